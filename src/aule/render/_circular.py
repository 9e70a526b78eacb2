"""Constants of sine and cosine for languages whose own functions are inaccurate away from 0."""

from __future__ import annotations

HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
"""pi/2 as the sum of three f32 numbers."""
SIN = (-0.16666655242443085, 0.008332202211022377, -0.0001951987942447886)
"""sin(t) = t + t**3 p(t**2); least squares of the relative error on |t| <= pi/4."""
COS = (-0.5, 0.04166664555668831, -0.001388736185617745, 2.4437857064185664e-05)
"""cos(t) = 1 + t**2 p(t**2)."""
