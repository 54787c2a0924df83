"""Measuring any model on any text: text, windows, losses, routing, speed."""
