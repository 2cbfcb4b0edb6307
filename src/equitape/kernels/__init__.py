"""The one heavy operation of our own, the update of TAPE's field; the plain version defines it."""

from .reference import update_field

__all__ = ["update_field"]
