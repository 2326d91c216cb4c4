"""Rows to tokens: prompts, train items, evaluation batches and the DataModules that yield them."""
