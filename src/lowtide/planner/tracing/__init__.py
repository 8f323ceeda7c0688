"""A training step run on tensors without memory: what is born and dies in it, as on the device that is planned for."""
