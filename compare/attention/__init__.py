"""Limits of normalized attention in real transformers: a report per head, and the five experiments."""

from compare.attention.experiments import critical_against_length as critical_against_length
from compare.attention.experiments import distance_against_length as distance_against_length
from compare.attention.experiments import distance_against_selected as distance_against_selected
from compare.attention.experiments import separability_against_selected as separability_against_selected
from compare.attention.gradient import gradient_against_temperature as gradient_against_temperature
from compare.attention.report import attention_report as attention_report
