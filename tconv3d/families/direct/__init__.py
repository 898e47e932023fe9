"""Multiply-adds for every geometry and type."""
