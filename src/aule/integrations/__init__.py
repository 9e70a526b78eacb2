"""ADD AN INTEGRATION HERE: one file per package above attention. Each is imported by its user, never by aule."""
