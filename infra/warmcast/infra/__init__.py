"""Local infrastructure: real servers for the demo and the tests, and the demo itself."""
