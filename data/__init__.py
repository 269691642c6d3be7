"""Pictures of shapes, the tiny checkpoints that point at them, and the recipe that trains those checkpoints."""
