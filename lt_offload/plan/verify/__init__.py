"""Tests that every plan has to pass: it is checked against its profile, ordered without races, and simulated."""
