"""Up-convolutions, whose kernel equals their stride."""
