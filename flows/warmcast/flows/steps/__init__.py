"""The steps of a deploy: plain functions, usable and testable with no Prefect."""
