"""HelloDeepSpeed's `train_bert.py` and `train_bert_ds.py`, with their flags."""
