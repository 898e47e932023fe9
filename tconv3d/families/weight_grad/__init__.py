"""Weight gradients on tensor cores."""
