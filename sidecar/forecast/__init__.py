"""Forecasts of one series, online: memory and work per observation are constant, and no clock is read."""

from __future__ import annotations

from sidecar.forecast.base import Forecaster, Prediction
from sidecar.forecast.burst import BurstForecast
from sidecar.forecast.bursts import BurstForecaster
from sidecar.forecast.online import HORIZONS_S, SmoothingForecaster

__all__ = ["HORIZONS_S", "BurstForecast", "BurstForecaster", "Forecaster", "Prediction", "SmoothingForecaster"]
