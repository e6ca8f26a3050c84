"""What one process does with others: tensor parallelism of one model, and experts that several engines
share."""
