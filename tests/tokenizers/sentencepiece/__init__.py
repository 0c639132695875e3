"""SentencePiece models."""
