"""Run time: what a worker imports at boot to get verified weights from the fastest place."""
