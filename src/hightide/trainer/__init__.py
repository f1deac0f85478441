"""transformers' Trainer: wraps its model by itself, follows the plan, and saves as hightide does."""
