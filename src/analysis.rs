//! Set algebra over a capture: for every parameter, in which steps of which ranks what was true.
//!
//! Parameters that are alike in everything that was recorded form one [`Profile`], so that the work and the answer grow
//! with the number of different histories, not with the number of parameters.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::bitset::Row;
use crate::capture::{Capture, Lane, Passes, Shape, flags};
use crate::params::Parameter;
use crate::ranges::Ranges;

/// What can be true of a parameter in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It was trainable when one of the step's passes began.
    Trainable,
    /// A defined gradient was accumulated into it.
    Covered,
    /// Trainable and not covered.
    Missed,
    /// Missed in a step that ended as it should; what a step that broke off lacks, it might still have got.
    MissedForGood,
    /// Missed in a finished pass, covered in its step.
    MissedInPass,
    /// Its accumulator ran in a pass without a defined gradient.
    Undefined,
    /// Its accumulator ran more than once in a pass that the wrapper averages.
    Again,
    /// The wrapper waits for it in a pass that it averages, and it was not covered in that pass.
    AwaitedInVain,
    /// The wrapper waits for it in a finished pass that it averages, and its accumulator ran neither in it nor in those that
    /// followed in the step, which go on with a reduction that has not ended. Unless a flag lets the wrapper do without, the
    /// step left it unfinished.
    Unreached,
    /// The wrapper would average it, it was covered in a pass that no forward of the wrapper prepared, and no averaged pass
    /// followed in its step, which would have averaged what had accumulated. Only in a step that ended as it should.
    Bypassed,
    /// The wrapper waits for it, and it does not require a gradient.
    FrozenAwaited,
    /// It requires a gradient and was frozen when the wrapper was built.
    Thawed,
    /// It requires a gradient and was no part of the model when the wrapper was built.
    Replaced,
    /// It was covered, and no optimizer that the user named holds it.
    Unheld,
}

/// Number of [`Kind`]s.
pub const NUM_KINDS: usize = Kind::ALL.len();

impl Kind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 14] = [
        Self::Trainable,
        Self::Covered,
        Self::Missed,
        Self::MissedForGood,
        Self::MissedInPass,
        Self::Undefined,
        Self::Again,
        Self::AwaitedInVain,
        Self::Unreached,
        Self::Bypassed,
        Self::FrozenAwaited,
        Self::Thawed,
        Self::Replaced,
        Self::Unheld,
    ];

    /// The name under which callers ask for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trainable => "trainable",
            Self::Covered => "covered",
            Self::Missed => "missed",
            Self::MissedForGood => "missed_for_good",
            Self::MissedInPass => "missed_in_pass",
            Self::Undefined => "undefined",
            Self::Again => "again",
            Self::AwaitedInVain => "awaited_in_vain",
            Self::Unreached => "unreached",
            Self::Bypassed => "bypassed",
            Self::FrozenAwaited => "frozen_awaited",
            Self::Thawed => "thawed",
            Self::Replaced => "replaced",
            Self::Unheld => "unheld",
        }
    }
}

/// What was found out about a capture.
pub struct Analysis {
    /// The parameters of all lanes, each name once, in order of first appearance.
    pub parameters: Vec<Parameter>,
    /// Per lane of the capture, in its order.
    pub lanes: Vec<LaneSummary>,
    /// Parameters that are alike.
    pub profiles: Vec<Profile>,
    /// Parameters that lanes define differently, with each lane's shape and type.
    pub conflicts: Vec<Conflict>,
    /// How many different sets of parameters the wrapper awaited in vain, over all finished, averaged passes of all lanes.
    pub num_vain_sets: usize,
}

/// What was found out about the ranks of one lane.
#[derive(Default)]
pub struct LaneSummary {
    /// Steps in which a pass began or an optimizer stepped.
    pub num_steps: u64,
    /// Backward passes begun.
    pub num_passes: u64,
    /// Steps that ended as they should.
    pub finished: Ranges,
    /// Steps that did not end, but in which a pass did.
    pub interrupted: Ranges,
    /// Steps in which a pass that ended, or the optimizer without one, reached no parameter.
    pub idle: Ranges,
    /// Sets awaited in vain, as in [`Analysis::num_vain_sets`], in this lane alone.
    pub num_vain_sets: usize,
    /// The same for parameters whose accumulator did not run, which is what DDP sees.
    pub num_unreached_sets: usize,
    /// Most tensors that the wrapper waited for and that were no longer part of the model.
    pub num_orphans: u32,
    /// Whether a wrapper was there.
    pub has_wrapper: bool,
    /// The pass in which the ranks ended, if they ended inside one.
    pub broken_off: Option<BrokenOff>,
}

/// A pass that never ended, or ended with the exception that ended the run.
pub struct BrokenOff {
    /// Parameters covered by then.
    pub covered: Vec<u32>,
    /// Trainable parameters that were not.
    pub lacking: Vec<u32>,
    /// Whether that is known.
    pub is_seen: bool,
}

/// Parameters of which everything that was recorded is the same, and what it is.
pub struct Profile {
    /// Indices into [`Analysis::parameters`].
    pub parameters: Vec<u32>,
    /// Whether they ever required a gradient.
    pub trainable: bool,
    /// Lanes whose ranks have these parameters, and their steps by [`Kind`].
    pub lanes: Vec<(u32, [Ranges; NUM_KINDS])>,
}

/// Analyses a capture.
pub fn analyse(capture: &Capture) -> Analysis {
    // Without an optimizer step on any rank every pass is a step; the ranks must agree on that.
    let by_pass = !capture.run.optimizer_given && capture.lanes.iter().all(|lane| lane.steps.is_empty());
    let mut parameters = Vec::new();
    let mut ids = HashMap::new();
    let mut all_vain = HashSet::new();
    let mut lanes = Vec::new();
    for lane in &capture.lanes {
        let renumber: Vec<u32> = (lane.params.as_slice().iter())
            .map(|p| {
                *ids.entry(p.name.as_str()).or_insert_with(|| {
                    parameters.push(p.clone());
                    parameters.len() as u32 - 1
                })
            })
            .collect();
        lanes.push(LaneRows::new(lane, &renumber, by_pass, &mut all_vain));
    }
    let classes = refine(parameters.len(), lanes.iter().flat_map(LaneRows::rows));
    let profiles = classes.into_iter().map(|members| profile(members, &lanes)).collect();
    Analysis {
        conflicts: conflicts(capture, &ids, &parameters),
        num_vain_sets: all_vain.len(),
        lanes: lanes.into_iter().map(|l| l.summary).collect(),
        parameters,
        profiles,
    }
}

/// A parameter, and for each lane that has it the lane, shape and type.
pub type Conflict = (u32, Vec<(u32, Vec<u64>, String)>);

fn conflicts(capture: &Capture, ids: &HashMap<&str, u32>, parameters: &[Parameter]) -> Vec<Conflict> {
    let is_alike = |a: &Parameter, b: &Parameter| a.shape == b.shape && a.dtype == b.dtype;
    let mut tables = HashSet::new();
    let odd: BTreeSet<u32> = (capture.lanes.iter())
        .filter(|lane| tables.insert(Arc::as_ptr(&lane.params)))
        .flat_map(|lane| lane.params.as_slice())
        .filter_map(|p| Some(ids[p.name.as_str()]).filter(|&id| !is_alike(p, &parameters[id as usize])))
        .collect();
    let of_lanes = |id: u32| {
        let name = &parameters[id as usize].name;
        let find = |lane: &Lane| lane.params.as_slice().iter().find(|p| p.name == *name).cloned();
        let lanes = capture.lanes.iter().enumerate().filter_map(|(i, lane)| Some((i as u32, find(lane)?)));
        lanes.map(|(i, p)| (i, p.shape, p.dtype)).collect()
    };
    odd.into_iter().map(|id| (id, of_lanes(id))).collect()
}

/// A stretch of equal steps.
struct Segment {
    first: u64,
    count: u64,
    /// Index into [`LaneRows::steps`].
    step: usize,
}

/// A step shape, worked out.
struct StepRows {
    of_kind: [Row; NUM_KINDS],
    /// Whether one of its passes reached nothing, to its end.
    is_idle: bool,
}

/// A lane with its step shapes worked out, in the numbering of the whole analysis.
struct LaneRows {
    summary: LaneSummary,
    present: Row,
    trainable: Row,
    steps: Vec<StepRows>,
    segments: Vec<Segment>,
}

impl LaneRows {
    fn new(lane: &Lane, renumber: &[u32], by_pass: bool, all_vain: &mut HashSet<Row>) -> Self {
        let (mut vain, mut unreached) = (HashSet::new(), HashSet::new());
        let mut sets = (&mut vain, &mut unreached);
        let mut summary = LaneSummary { broken_off: broken_off(lane, renumber), ..LaneSummary::default() };
        for situation in &lane.situations {
            summary.num_orphans = summary.num_orphans.max(situation.num_orphans);
            summary.has_wrapper |= situation.has_wrapper;
        }
        let trainable = lane.situations.iter().fold(Row::default(), |all, s| all.union(&s.trainable));
        let mut out = Self {
            present: renumber.iter().copied().collect(),
            trainable: trainable.renumbered(renumber),
            steps: Vec::new(),
            segments: Vec::new(),
            summary,
        };
        let mut known: HashMap<u32, usize> = HashMap::new();
        for &(shape, count) in &lane.steps {
            let step = *known.entry(shape).or_insert_with(|| {
                out.steps.push(step_rows(lane, &lane.shapes[shape as usize], true, renumber, &mut sets));
                out.steps.len() - 1
            });
            out.add_segment(&lane.shapes[shape as usize], count, step, true);
        }
        let open: Vec<(Shape, u64)> = if by_pass {
            lane.open.iter().map(|&p| (vec![Passes { count: 1, ..p }], p.count)).collect()
        } else {
            (!lane.open.is_empty()).then(|| (lane.open.clone(), 1)).into_iter().collect()
        };
        for (shape, count) in open {
            let is_finished = by_pass || lane.end.as_deref() == Some("clean");
            out.steps.push(step_rows(lane, &shape, is_finished, renumber, &mut sets));
            out.add_segment(&shape, count, out.steps.len() - 1, is_finished);
        }
        out.summary.num_vain_sets = vain.len();
        out.summary.num_unreached_sets = unreached.len();
        all_vain.extend(vain.into_iter().map(|row| row.renumbered(renumber)));
        out
    }

    fn add_segment(&mut self, shape: &Shape, count: u64, step: usize, is_closed: bool) {
        let summary = &mut self.summary;
        let (first, last) = (summary.num_steps, summary.num_steps + count - 1);
        let passes: u64 = shape.iter().filter(|p| p.flags & flags::EMPTY == 0).map(|p| p.count).sum();
        summary.num_steps += count;
        summary.num_passes = summary.num_passes.saturating_add(passes.saturating_mul(count));
        if is_closed && shape.iter().all(is_whole) {
            summary.finished.push(first, last);
        } else if shape.iter().any(is_whole) {
            summary.interrupted.push(first, last);
        }
        if self.steps[step].is_idle {
            summary.idle.push(first, last);
        }
        self.segments.push(Segment { first, count, step });
    }

    fn rows(&self) -> impl Iterator<Item = &Row> {
        self.steps.iter().flat_map(|step| &step.of_kind).chain([&self.present, &self.trainable])
    }
}

fn is_whole(passes: &Passes) -> bool {
    passes.flags & (flags::RAISED | flags::OPEN) == 0
}

/// Works out a step shape, and adds what was awaited in vain in its passes, and what was not even reached, to `sets`.
fn step_rows(
    lane: &Lane,
    shape: &Shape,
    is_closed: bool,
    renumber: &[u32],
    (vain, unreached): &mut (&mut HashSet<Row>, &mut HashSet<Row>),
) -> StepRows {
    let is_finished = is_closed && shape.iter().all(is_whole);
    let mut kinds: [Row; NUM_KINDS] = Default::default();
    let mut add = |kind: Kind, row: &Row| kinds[kind as usize] = kinds[kind as usize].union(row);
    let mut is_idle = false;
    let [mut missed_in_pass, mut bypassed, mut pending]: [Row; 3] = Default::default();
    for passes in shape {
        let pattern = &lane.patterns[passes.pattern as usize];
        let situation = &lane.situations[pattern.situation as usize];
        add(Kind::Trainable, &situation.trainable);
        add(Kind::Covered, &pattern.covered);
        add(Kind::Undefined, &pattern.reached.difference(&pattern.covered));
        add(Kind::Unheld, &pattern.covered.difference(&situation.optimized));
        is_idle |= is_whole(passes) && pattern.reached.is_empty();
        if passes.flags & flags::EMPTY == 0 && is_whole(passes) {
            missed_in_pass = missed_in_pass.union(&situation.trainable.difference(&pattern.covered));
        }
        if !situation.has_wrapper {
            continue;
        }
        let outside = situation.awaited.union(&situation.ignored);
        let stray = situation.trainable.difference(&outside);
        add(Kind::Thawed, &stray.intersection(&situation.wrapped));
        add(Kind::Replaced, &stray.difference(&situation.wrapped));
        add(Kind::FrozenAwaited, &situation.awaited.difference(&situation.trainable));
        if passes.flags & flags::BYPASSED != 0 {
            bypassed = bypassed.union(&pattern.covered.intersection(&situation.awaited));
        }
        if passes.flags & (flags::NO_SYNC | flags::EMPTY) == 0 {
            bypassed = Row::default(); // what had accumulated is averaged with the rest
            add(Kind::Again, &pattern.again);
            // Of many equal passes the second may begin anew what the first brought to an end; the third does as the second.
            for _ in 0..passes.count.min(2) {
                let is_anew = pending.is_empty();
                pending = if is_anew { &situation.awaited } else { &pending }.difference(&pattern.reached);
            }
            if is_whole(passes) {
                let in_vain = situation.awaited.difference(&pattern.covered);
                add(Kind::AwaitedInVain, &in_vain);
                vain.insert(in_vain);
                unreached.insert(situation.awaited.difference(&pattern.reached));
            } else {
                pending = Row::default(); // might still have been reached
            }
        }
    }
    add(Kind::Unreached, &pending);
    let covered = &kinds[Kind::Covered as usize];
    let missed = kinds[Kind::Trainable as usize].difference(covered);
    if is_finished {
        kinds[Kind::MissedInPass as usize] = missed_in_pass.intersection(covered);
        kinds[Kind::MissedForGood as usize] = missed.clone();
        kinds[Kind::Bypassed as usize] = bypassed;
    }
    kinds[Kind::Missed as usize] = missed;
    StepRows { of_kind: kinds.map(|row| row.renumbered(renumber)), is_idle }
}

fn broken_off(lane: &Lane, renumber: &[u32]) -> Option<BrokenOff> {
    let last = lane.open.last().filter(|p| !is_whole(p) && lane.end.as_deref() != Some("clean"))?;
    let pattern = &lane.patterns[last.pattern as usize];
    let lacking = lane.situations[pattern.situation as usize].trainable.difference(&pattern.covered);
    let ids = |row: &Row| row.renumbered(renumber).iter().collect();
    let is_seen = last.flags & flags::UNSEEN == 0;
    Some(BrokenOff { covered: ids(&pattern.covered), lacking: ids(&lacking), is_seen })
}

/// Splits the parameters into classes of which no row tells two members apart. Partition refinement: each row splits every
/// class that it holds a part of. A row and its complement split alike, so that the smaller is taken.
fn refine<'a>(num_parameters: usize, rows: impl Iterator<Item = &'a Row>) -> Vec<Vec<u32>> {
    let everything: Row = (0..num_parameters as u32).collect();
    let mut class_of = vec![0_u32; num_parameters];
    let mut sizes = vec![num_parameters];
    let mut inside = vec![0_usize];
    let mut seen = HashSet::new();
    for row in rows.filter(|row| !row.is_empty() && seen.insert(*row)) {
        let is_small = row.count() as usize * 2 <= num_parameters;
        let complement = if is_small { Row::default() } else { everything.difference(row) };
        let smaller = if is_small { row } else { &complement };
        let mut touched = Vec::new();
        for id in smaller.iter() {
            let class = class_of[id as usize];
            if inside[class as usize] == 0 {
                touched.push(class);
            }
            inside[class as usize] += 1;
        }
        let mut split = HashMap::new();
        for class in touched {
            let size = std::mem::take(&mut inside[class as usize]);
            if size < sizes[class as usize] {
                sizes[class as usize] -= size;
                sizes.push(size);
                inside.push(0);
                split.insert(class, sizes.len() as u32 - 1);
            }
        }
        if !split.is_empty() {
            for id in smaller.iter() {
                if let Some(&new) = split.get(&class_of[id as usize]) {
                    class_of[id as usize] = new;
                }
            }
        }
    }
    let mut classes = vec![Vec::new(); sizes.len()];
    for (id, class) in class_of.into_iter().enumerate() {
        classes[class as usize].push(id as u32);
    }
    classes.retain(|members| !members.is_empty());
    classes.sort_unstable();
    classes
}

fn profile(parameters: Vec<u32>, lanes: &[LaneRows]) -> Profile {
    let one = parameters[0];
    let present = || lanes.iter().enumerate().filter(|(_, lane)| lane.present.contains(one));
    let of_lane = |lane: &LaneRows| {
        let mut out: [Ranges; NUM_KINDS] = Default::default();
        for segment in &lane.segments {
            for (ranges, row) in out.iter_mut().zip(&lane.steps[segment.step].of_kind) {
                if row.contains(one) {
                    ranges.push(segment.first, segment.first + segment.count - 1);
                }
            }
        }
        out
    };
    Profile {
        trainable: present().any(|(_, lane)| lane.trainable.contains(one)),
        lanes: present().map(|(i, lane)| (i as u32, of_lane(lane))).collect(),
        parameters,
    }
}
