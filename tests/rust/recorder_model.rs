//! Any sequence of calls against a plain model. After each call the shard is read as it is at that moment, as if the process
//! had been killed there; and a recorder without a file must say the same.

use std::fs;

use _core::bitset::Row;
use _core::capture::{Fact, Pattern, Situation, flags};
use _core::journal::read_shard;
use _core::params::Parameter;
use _core::recorder::{Recorder, Slot};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::samples::{PassContent, contents, parameters, run_id};

#[derive(Clone, Debug)]
enum Call {
    Define(u32),
    Redefine(Index),
    Situation(Vec<Index>, u32),
    Begin,
    Drop,
    Arrive(Index, bool),
    Accumulate(Index),
    ClosePass(u32),
    /// Many passes that alternate, as without an optimizer.
    Alternate(Index, u32),
    CloseStep,
    Note,
    Finish,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let index = any::<Index>;
    let call = prop_oneof![
        2 => (1_u32..120).prop_map(Call::Define),
        1 => index().prop_map(Call::Redefine),
        3 => (prop::collection::vec(index(), 0..4), 0_u32..2).prop_map(|(ids, n)| Call::Situation(ids, n)),
        6 => Just(Call::Begin),
        1 => Just(Call::Drop),
        8 => (index(), any::<bool>()).prop_map(|(id, defined)| Call::Arrive(id, defined)),
        10 => index().prop_map(Call::Accumulate),
        10 => prop::sample::select(vec![0, flags::NO_SYNC, flags::RAISED, flags::NO_SYNC | flags::BYPASSED]).prop_map(Call::ClosePass),
        1 => (index(), 20_u32..40).prop_map(|(id, num)| Call::Alternate(id, num)),
        6 => Just(Call::CloseStep),
        1 => Just(Call::Note),
    ];
    let start = vec![Call::Define(3), Call::Situation(vec![], 0)];
    let usual = prop::collection::vec(call.clone(), 0..60).prop_map(move |calls| [start.clone(), calls].concat());
    let unprepared = prop::collection::vec(call, 0..30);
    (prop_oneof![4 => usual, 1 => unprepared], any::<bool>()).prop_map(|(mut calls, is_finished)| {
        calls.extend(is_finished.then_some(Call::Finish));
        calls
    })
}

#[derive(Default)]
struct Model {
    params: Vec<Parameter>,
    defined: Vec<bool>,
    situation: Option<Situation>,
    is_open: bool,
    rows: Pattern,
    steps: Vec<Vec<PassContent>>,
    passes: Vec<PassContent>,
    facts: Vec<Fact>,
    end: Option<String>,
}

impl Model {
    fn accumulate(&mut self, id: u32) {
        let one: Row = [id].into_iter().collect();
        self.rows.again = self.rows.again.union(&self.rows.reached.intersection(&one));
        self.rows.reached = self.rows.reached.union(&one);
        if std::mem::take(&mut self.defined[id as usize]) {
            self.rows.covered = self.rows.covered.union(&one);
        }
    }

    fn pass(&self, flags: u32) -> Option<PassContent> {
        let situation = self.situation.clone()?;
        let covered = self.rows.covered.intersection(&situation.trainable);
        Some((situation, Pattern { covered, ..self.rows.clone() }, flags))
    }

    fn close_pass(&mut self, flags: u32) -> bool {
        let Some(pass) = self.pass(flags) else { return false };
        self.passes.push(pass);
        self.rows = Pattern::default();
        self.is_open = false;
        true
    }

    fn close_step(&mut self) -> bool {
        if self.passes.is_empty() {
            let Some(situation) = self.situation.clone() else { return false };
            self.passes.push((situation, Pattern::default(), flags::EMPTY));
        }
        self.steps.push(std::mem::take(&mut self.passes));
        true
    }

    /// What a reader must see now: the closed steps, and the passes since.
    fn contents(&self) -> (Vec<Vec<PassContent>>, Vec<PassContent>) {
        let open = self.pass(flags::OPEN).filter(|_| self.is_open);
        (self.steps.clone(), self.passes.iter().cloned().chain(open).collect())
    }
}

/// A recorder and its slots.
struct Live(Recorder, Vec<Slot>);

fn hit(id: u32, model: &mut Model, lives: &[Live]) {
    model.accumulate(id);
    lives.iter().for_each(|live| live.1[id as usize].accumulated());
}

fn perform(call: Call, model: &mut Model, lives: &mut [Live]) {
    let num = model.params.len() as u32;
    let pick = |index: Index| index.index(num.max(1) as usize) as u32;
    match call {
        Call::Define(more) => {
            model.params.extend(parameters(num..num + more));
            model.defined.resize(model.params.len(), false);
            for Live(recorder, slots) in lives {
                recorder.define(num, parameters(num..num + more)).unwrap();
                slots.extend((num..num + more).map(|id| recorder.slot(id).unwrap()));
            }
        }
        Call::Situation(frozen, num_orphans) => {
            let frozen: Row = frozen.into_iter().map(pick).collect();
            let registered: Row = (0..num).collect();
            let trainable = registered.difference(&frozen);
            let situation = Situation { registered, trainable, num_orphans, ..Situation::default() };
            model.situation = Some(situation.clone());
            lives.iter().for_each(|live| live.0.set_situation(situation.clone()).unwrap());
        }
        Call::Begin => {
            model.is_open = true;
            lives.iter().for_each(|live| live.0.begin_pass(false));
        }
        Call::Drop => {
            model.is_open = false;
            lives.iter().for_each(|live| live.0.drop_pass());
        }
        Call::ClosePass(flags) => {
            let fine = model.close_pass(flags);
            lives.iter().for_each(|live| assert_eq!(live.0.close_pass(flags).is_ok(), fine));
        }
        Call::CloseStep => {
            let fine = model.close_step();
            lives.iter().for_each(|live| assert_eq!(live.0.close_step().is_ok(), fine));
        }
        Call::Note => {
            let fact = Fact { topic: "steps".into(), body: model.steps.len().to_string() };
            model.facts.push(fact.clone());
            lives.iter().for_each(|live| live.0.note(fact.clone()).unwrap());
        }
        Call::Finish => {
            model.end = Some("clean".into());
            lives.iter().for_each(|live| live.0.finish("clean").unwrap());
        }
        _ if num == 0 => {}
        Call::Redefine(id) => {
            let id = pick(id);
            let mut anew = parameters(id..id + 1);
            anew[0].shape.push(u64::from(num));
            model.params[id as usize] = anew[0].clone();
            lives.iter().for_each(|live| live.0.define(id, anew.clone()).unwrap());
        }
        Call::Arrive(id, defined) => {
            model.defined[pick(id) as usize] = defined;
            lives.iter().for_each(|live| live.1[pick(id) as usize].arrived(defined));
        }
        Call::Accumulate(id) => hit(pick(id), model, lives),
        Call::Alternate(id, times) => {
            for i in 0..times {
                hit((pick(id) + i % 2) % num, model, lives);
                let fine = model.close_pass(0);
                lives.iter().for_each(|live| assert_eq!(live.0.close_pass(0).is_ok(), fine));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_shard_tells_at_any_moment_what_happened(calls in calls()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.bin.rank2");
        let mut lives = [Some(path.as_path()), None].map(|path| Live(Recorder::new(path, &run_id(), 2).unwrap(), vec![]));
        let mut model = Model::default();
        for call in calls {
            perform(call, &mut model, &mut lives);
            let (run, lane) = read_shard(&fs::read(&path).unwrap()).unwrap();
            prop_assert_eq!(run, run_id());
            prop_assert_eq!(lane.ranks.as_slice(), [(2, 2)]);
            prop_assert_eq!(lane.params.as_slice(), &model.params);
            prop_assert_eq!(&lane.facts, &model.facts);
            prop_assert_eq!(&lane.end, &model.end);
            prop_assert!(contents(&lane) == model.contents(), "{lane:?}");
            for live in &lives {
                prop_assert_eq!(live.0.has_passes(), !model.passes.is_empty());
                prop_assert_eq!(live.0.is_touched(), !model.rows.reached.is_empty());
                prop_assert_eq!(&live.0.reached(), &model.rows.reached);
                prop_assert_eq!(&live.0.lane().unwrap().1, &lane);
            }
        }
    }
}
