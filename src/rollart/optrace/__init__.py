"""Echo: a distributed training step predicted from one device, or none."""
