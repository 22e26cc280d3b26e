"""The demo: a real model is deployed, and worker after worker boots from what is there.

``run`` is the play; ``worker`` and ``reference`` are processes of their own, ``channel`` is the
pipe to them, ``encode`` what both do with the model, ``places`` the devices they run on, and
``result`` what came of it.
"""
