"""What all training recipes share: settings, data, the run's folder, the training loop, results and the card."""
