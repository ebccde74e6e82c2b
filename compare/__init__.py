"""Whether theory and simulation agree: verdicts, alignment of heads, labelled stores of results, parameter sweeps,
and the limits of normalized attention in real transformers."""

from compare._bands import Band as Band
from compare._residual import Residual as Residual
from compare.agreement import Agreement as Agreement
from compare.agreement import agreement as agreement
from compare.alignment import Alignment as Alignment
from compare.alignment import align as align
from compare.alignment import sign_symmetries as sign_symmetries
from compare.attention import attention_report as attention_report
from compare.attention import critical_against_length as critical_against_length
from compare.attention import distance_against_length as distance_against_length
from compare.attention import distance_against_selected as distance_against_selected
from compare.attention import gradient_against_temperature as gradient_against_temperature
from compare.attention import separability_against_selected as separability_against_selected
from compare.driver import InUse as InUse
from compare.normalizers import gradient_against_length as gradient_against_length
from compare.normalizers import risk_against_length as risk_against_length
from compare.normalizers import stability_against_rate as stability_against_rate
from compare.scaling import ResidualScaling as ResidualScaling
from compare.scaling import residual_scaling as residual_scaling
from compare.shift import TimeShift as TimeShift
from compare.shift import time_shift as time_shift
from compare.slopes import StageSlope as StageSlope
from compare.slopes import log_dim_slope as log_dim_slope
from compare.stages import StageTimes as StageTimes
from compare.stages import stage_times as stage_times
from compare.store import Store as Store
from compare.store import load as load
from compare.store import save as save
from compare.sweeps.store import StoredSweep as StoredSweep
from compare.sweeps.store import open_sweep as open_sweep
from compare.sweeps.sweep import SweepInterrupted as SweepInterrupted
from compare.sweeps.sweep import plan_sweep as plan_sweep
from compare.sweeps.sweep import sweep as sweep
