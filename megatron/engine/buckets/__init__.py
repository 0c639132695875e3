"""Buckets: ranges of parameters that data-parallel ranks divide, and exchange in one message while passes run.

`parameter_groups` makes buckets, `BucketQueue` orders their messages, `Averaging` and `WeightGathers` send them.
"""
