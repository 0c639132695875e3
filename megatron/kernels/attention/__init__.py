"""Attention: the general form (`dense`), and forms for documents and windows that compute only what is visible."""
