"""A server over HTTP: requests that arrive together are decoded together."""
