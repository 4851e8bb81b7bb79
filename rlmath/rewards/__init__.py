"""Rewards from checking the final answer, in processes that can be killed."""
