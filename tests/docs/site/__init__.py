"""Tests of the pages that the site is made with."""
