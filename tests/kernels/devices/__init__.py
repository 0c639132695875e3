"""Every operation of `csrc/ops` on every device that is here: values, gradients and repetition, one set of cases."""
