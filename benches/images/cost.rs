//! Duration of resolutions: with everything cached, and with a containerd that does not answer.

use std::{collections::HashMap, time::Instant};

use archaware::image::{
    PullPolicy, ResolveRequest,
    credentials::{Keyring, ready_keyring},
};
use testimg::FakeRegistry;

use testsupport::servers::Containerd;

use crate::resolving::{resolve, resolver, resolver_at, settings};

use super::{median, report};

const ROUNDS: usize = 200_000;

pub(crate) async fn warm() {
    let registry = FakeRegistry::start().await.unwrap();
    let resolver = resolver(settings());
    let images: Vec<String> = (0..100)
        .map(|n| registry.image(&format!("app{n}")))
        .collect();
    for (number, image) in images.iter().enumerate() {
        registry.add(&format!("app{number}"), &testimg::numbered(number));
        resolve(&resolver, image, &Keyring::default())
            .await
            .unwrap();
    }
    let keys = ready_keyring(Keyring::default());
    let started = Instant::now();
    for round in 0..ROUNDS {
        let request = ResolveRequest {
            image: &images[round % 100],
            policy: PullPolicy::IfNotPresent,
            keyring: &keys,
            tenant: "",
        };
        std::hint::black_box(resolver.resolve(request).await.unwrap());
    }
    let ours = ROUNDS as f64 / started.elapsed().as_secs_f64();
    // The floor: a map without tags, ages, digests and tenants.
    let map: HashMap<&str, Vec<u8>> = images
        .iter()
        .map(|image| (image.as_str(), vec![0; 64]))
        .collect();
    let started = Instant::now();
    for round in 0..ROUNDS {
        std::hint::black_box(map[std::hint::black_box(images[round % 100].as_str())].clone());
    }
    let floor = ROUNDS as f64 / started.elapsed().as_secs_f64();
    report(
        "resolutions a second, all in memory (one thread)",
        &format!("{ours:.0}"),
        &format!("{floor:.0}"),
        "-",
    );
}

pub(crate) async fn hung() {
    let registry = FakeRegistry::start().await.unwrap();
    let containerd = Containerd::start(&Containerd::binaries()[0]).await;
    let images: Vec<String> = (0..33)
        .map(|n| registry.image(&format!("app{n}")))
        .collect();
    for number in 0..images.len() {
        registry.add(&format!("app{number}"), &testimg::numbered(number));
    }
    let time = async |resolver: &archaware::image::Resolver, image: &str| {
        let started = Instant::now();
        resolve(resolver, image, &Keyring::default()).await.unwrap();
        started.elapsed().as_secs_f64() * 1000.0
    };
    let without = resolver(settings());
    let mut floor = Vec::new();
    for image in &images {
        floor.push(time(&without, image).await);
    }
    let floor = median(&mut floor);
    containerd.signal("-STOP");
    let silent = resolver_at(&containerd.socket(), settings());
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for image in &images {
        let took = time(&silent, image).await;
        if silent.containerd_is_up() == Some(true) {
            &mut before
        } else {
            &mut after
        }
        .push(took);
    }
    containerd.signal("-CONT");
    let worst = before.iter().copied().fold(0.0, f64::max);
    let floor_text = format!("{floor:.1} ms");
    report(
        "new image, containerd hung, breaker closed (worst)",
        &format!("{worst:.1} ms"),
        &floor_text,
        "+ 250 ms",
    );
    report(
        "new image, containerd hung, breaker open (median)",
        &format!("{:.1} ms", median(&mut after)),
        &floor_text,
        "+ 0 ms",
    );
}
