"""What D → ∞ says: the single-location model, its order parameters, population risk and gradient flow.

Importing this package switches JAX to 64-bit (`jax_enable_x64`): the theory is computed in float64.
No other global flag is touched.
"""

import jax

jax.config.update("jax_enable_x64", True)

from theory.activation import Activation as Activation  # noqa: E402
from theory.activation import BayesSoftmax as BayesSoftmax  # noqa: E402
from theory.activation import Softmax as Softmax  # noqa: E402
from theory.activation import Softmax1 as Softmax1  # noqa: E402
from theory.bayes import bayes_heads as bayes_heads  # noqa: E402
from theory.bayes import bayes_risk as bayes_risk  # noqa: E402
from theory.costs import HeadCosts as HeadCosts  # noqa: E402
from theory.costs import head_costs as head_costs  # noqa: E402
from theory.flow import gradient_flow as gradient_flow  # noqa: E402
from theory.fluctuation import Fluctuations as Fluctuations  # noqa: E402
from theory.fluctuation import fluctuations as fluctuations  # noqa: E402
from theory.fluctuation import stochastic_flow as stochastic_flow  # noqa: E402
from theory.method import MonteCarlo as MonteCarlo  # noqa: E402
from theory.method import Quadrature as Quadrature  # noqa: E402
from theory.normalizer import AdaptiveSoftmax as AdaptiveSoftmax  # noqa: E402
from theory.normalizer import Entmax as Entmax  # noqa: E402
from theory.normalizer import ScalableSoftmax as ScalableSoftmax  # noqa: E402
from theory.normalizer import SelfAdjustedSoftmax as SelfAdjustedSoftmax  # noqa: E402
from theory.normalizer import Sigmoid as Sigmoid  # noqa: E402
from theory.normalizer import Sparsemax as Sparsemax  # noqa: E402
from theory.normalizer import TopK as TopK  # noqa: E402
from theory.normalizer import adaptive_inverse_temperature as adaptive_inverse_temperature  # noqa: E402
from theory.optimum import Optimum as Optimum  # noqa: E402
from theory.optimum import optimal_risk as optimal_risk  # noqa: E402
from theory.order import OrderParameters as OrderParameters  # noqa: E402
from theory.prior import GaussianMixture as GaussianMixture  # noqa: E402
from theory.prior import Prior as Prior  # noqa: E402
from theory.prior import discrete as discrete  # noqa: E402
from theory.prior import gaussian as gaussian  # noqa: E402
from theory.prior import one_hot as one_hot  # noqa: E402
from theory.prior import sign_flips as sign_flips  # noqa: E402
from theory.risk import population_risk as population_risk  # noqa: E402
from theory.saddle import CriticalPoint as CriticalPoint  # noqa: E402
from theory.saddle import HessianSpectrum as HessianSpectrum  # noqa: E402
from theory.saddle import hessian_spectrum as hessian_spectrum  # noqa: E402
from theory.saddle import unspecialized_point as unspecialized_point  # noqa: E402
from theory.stages import StagePrediction as StagePrediction  # noqa: E402
from theory.stages import predict_stages as predict_stages  # noqa: E402
from theory.staircase import Stage as Stage  # noqa: E402
from theory.staircase import saddle_path as saddle_path  # noqa: E402
from theory.task import SingleLocation as SingleLocation  # noqa: E402
from theory.trajectory import Result as Result  # noqa: E402
from theory.trajectory import RunFailed as RunFailed  # noqa: E402
from theory.trajectory import Trajectory as Trajectory  # noqa: E402
