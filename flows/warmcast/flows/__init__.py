"""Deploy time: Prefect flows over plain steps that turn a checkpoint into a deployment."""
