"""What the strangers' scripts would download, made here: models, data, and the few parts of torchvision they call."""
