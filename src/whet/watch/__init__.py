"""What a person sees of a run, and what may stop it: signals, guards, the lock, progress, logs and results."""
