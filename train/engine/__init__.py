"""What every rank does: spread the model, compute steps, save, evaluate, report."""
