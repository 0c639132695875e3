"""Training objectives: the loss, masked language modelling, fine-tuning on examples, distillation."""
