"""An HTML page about runs: settings, training curves, scores and attention."""
