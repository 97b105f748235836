"""From a task to what training needs: datasets, model, loss, optimizers, updates, schedules."""
