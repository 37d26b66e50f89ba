"""Calls as arguments of calls."""

from fastser.dispatch import Call as Call
