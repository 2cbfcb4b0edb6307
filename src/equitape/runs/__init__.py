"""Run folders: writing, locking, comparing and describing them, for every kind of run."""
