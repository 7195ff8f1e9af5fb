"""Groups of ranks that train by themselves, and take outer steps together (the option ``local``)."""
