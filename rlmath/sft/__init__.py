"""Supervised training: the run that launch/train_sft.py starts."""
