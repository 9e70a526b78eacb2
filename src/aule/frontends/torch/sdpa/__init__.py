"""PyTorch's own attention functions, served by aule."""
