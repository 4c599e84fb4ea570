"""What a training step is made of."""
