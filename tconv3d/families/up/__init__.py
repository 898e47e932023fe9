"""Kernel families for up-convolutions, whose kernel equals their stride."""
