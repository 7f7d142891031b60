"""Models in and out: runs made of other libraries' models, and runs written in other libraries' formats."""
