"""Events, layouts, manifests, formats and errors: what the roles share. Imports nothing heavy."""
