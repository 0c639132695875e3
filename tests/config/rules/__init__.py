"""Which requests are refused."""
