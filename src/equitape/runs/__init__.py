"""Run folders: how they are written, locked, compared and described, whatever kind of run they hold."""
