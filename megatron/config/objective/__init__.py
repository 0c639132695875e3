"""What is learned from which part of the data: the loss, the masking of masked language models, examples."""
