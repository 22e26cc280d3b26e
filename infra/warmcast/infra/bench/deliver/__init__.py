"""``warmcast bench deliver``: one model to a fleet of nodes at once, run small or forecast large.

``burst`` runs real agents on this machine; ``simulation`` tells what a fleet would do that no
machine holds.
"""
