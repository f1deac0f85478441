"""Lazy logits and the fused loss."""
