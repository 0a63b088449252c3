"""How a solve meets PyTorch's automatic differentiation."""
